"""From the flags to the rows of a phase: portions of sources, row makers, and the build itself."""
