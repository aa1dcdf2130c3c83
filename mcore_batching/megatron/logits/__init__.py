"""Log-probabilities and entropies of packed rows, and the output layer fused with them."""
