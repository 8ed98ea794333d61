"""Who started this process, with which peers: launchers, their variables, lists of hosts, exit status."""
