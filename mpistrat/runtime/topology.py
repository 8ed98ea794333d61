"""Where the ranks are: world, node, rail and leaders, made once per communicator."""
# placeholder, written next
