"""The benchmark: how fast leases are given and taken, beside what people would use instead, on this machine."""
