"""Fields of samples: their kinds, how these are found (`infer`), and whether values fit."""
