"""The command line: `optperm train` and `optperm evaluate`."""
