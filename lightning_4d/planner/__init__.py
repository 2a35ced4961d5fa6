"""Which layout, will it fit, how fast, and why: a cost model of training steps and a search over layouts."""
