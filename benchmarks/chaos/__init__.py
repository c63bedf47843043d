"""Real processes that train as a swarm, while they and their store are broken at random."""
