"""The whole machine as the test: what packaging/vm-test runs.

Here, on the host, `image` makes the machine's disk, `payload` what is put into it, `machine` boots it and listens.
Below `inside/` is what runs in the machine: a plain list of checks. `module/` is the kernel module that makes chips.

To add a check, write a function in a module of `inside/` and name it in `inside/main.py`; `inside/kit.py` has what
checks are written with. `packaging/vm-test --only WORD` runs those whose name has the word, `--shell` boots a machine
to look around in.
"""
