"""What must hold of a call, a module and a machine before a schedule runs."""
