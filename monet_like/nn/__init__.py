"""Modules for users: SyncBatchNorm for schedules, and layers that drop activations (DropIT)."""
