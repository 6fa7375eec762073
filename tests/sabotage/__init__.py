"""Changes to the core that tests must notice (``make sabotage``)."""
