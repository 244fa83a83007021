"""The command line: ``mesp finetune``, ``generate``, ``export-base`` and ``info``."""
