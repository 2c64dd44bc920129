"""What the operator acts in, for the tests of several tiers: `memory` on stand-ins and a clock, `processes` on real servers."""
