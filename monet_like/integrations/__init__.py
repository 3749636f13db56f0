"""Hooks into training libraries; each module needs its library, which this package does not depend on."""
