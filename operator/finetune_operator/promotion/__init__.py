"""The ModelPromotion reconciler: observe, apply, and the pass that joins them."""
