"""Loss scaling: rules, scalers, and the methods of ``torch.amp.GradScaler``."""
