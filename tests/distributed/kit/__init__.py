"""What the distributed tests are made of: launching, the reference, models, samples."""
