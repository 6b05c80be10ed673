"""The outside world: one module and one door for each thing in it. The modules do not know each other."""
