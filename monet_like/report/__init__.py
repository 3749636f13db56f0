"""Reports: a schedule as pictures, in one page."""
