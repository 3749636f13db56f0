"""From a module and a call to the joint graph of forward and backward."""
