"""A service that scores real flights, called from Spark: ``python -m spark_udfs.demo``.

Read it in this order: ``service.py`` (a service), ``job.py`` (a Spark job that calls it),
``scoring.py`` (what is computed, with numpy), ``flights.py`` (the data), ``checksum.py`` (how the
result is proved), ``__main__.py`` and ``report.py`` (what a person sees).
"""
