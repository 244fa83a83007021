"""Methods side by side: memory, time and gradients, each measured in processes of its own."""
