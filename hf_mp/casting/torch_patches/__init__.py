"""What autocast changes in torch while it is in use."""
