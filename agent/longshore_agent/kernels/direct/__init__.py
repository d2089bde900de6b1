"""From pages into another rank's pages."""
