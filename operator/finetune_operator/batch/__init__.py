"""What both wings share of batch Jobs: their owners, the states of Jobs and pods, what keeps pods from running, and pod templates."""
