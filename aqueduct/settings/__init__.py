"""What operators set: variables ``AQUEDUCT_*``, a TOML file, and options of ``aqueduct serve``.

::

    # prod.toml                              $ export AQUEDUCT_SERVE_WORKERS=4
    [serve]                                  $ export AQUEDUCT_TIMING_IDLE_TIMEOUT=2min
    listen = ["aqueduct+tcp://0.0.0.0:4433"]
    workers = 4

    [timing]
    idle_timeout = "2min"

``aqueduct.settings.table`` has the one table of names, made of the dataclasses: ``Serve``, and all
that ``aqueduct.config.Config`` holds. A section of the file is a field of Config, or ``serve``.

Of several places the first one counts: an option, a variable, the file, what code gave to
``Service`` or ``run``, the default. ``Service.run`` and ``aqueduct serve`` alone read these places.
A library is a guest: ``Service.serving``, clients and tests go by their code.
"""
