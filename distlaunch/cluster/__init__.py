"""Tasks and addresses, `TF_CONFIG`, ports, cores and GPUs."""
