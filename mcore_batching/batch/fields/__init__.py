"""Fields of samples: their kinds, how these are found, and whether values fit."""
