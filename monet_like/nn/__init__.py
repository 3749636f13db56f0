"""Modules for users."""
