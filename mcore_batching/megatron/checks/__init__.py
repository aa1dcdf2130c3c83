"""Settings, models and layers that packed rows cannot run on, refused by name."""
