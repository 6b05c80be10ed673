"""neurond: one ledger per host of who holds which AWS Neuron chip."""

__version__ = "0.1.0"
