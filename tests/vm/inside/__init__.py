"""What runs in the machine: `main` calls the checks of the other modules, which are written with `kit`."""
