"""A model of several replicas behind a router: traffic, replicas, rules, and what each rule makes of the traffic."""
