"""What tasks cost: seconds and bytes, measured or estimated."""
