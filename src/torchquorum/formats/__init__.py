"""Files on disk and on object stores: checkpoints, ledger, journal, measures, TFRecord files."""
