"""Loss scaling: pure rules, scalers, and the explicit style of GradScaler."""
