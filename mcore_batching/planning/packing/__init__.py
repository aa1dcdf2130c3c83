"""First-fit packing, and bounds that no packing and no plan goes under."""
