"""``sparing plan --interactive``: the planner as one page that answers while sliders move, without a network."""
