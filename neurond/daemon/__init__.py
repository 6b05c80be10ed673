"""The only place where the rules of the ledger and the outside world meet."""
