"""Fine-tuning methods: adapters, virtual tokens and new tokens."""
