"""Reports: draws a schedule as one HTML page."""
