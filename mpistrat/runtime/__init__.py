"""The ranks while a program runs: their topology, the options, and agreement between them."""
