"""One job on several engines: shards of a run, engines side by side on one machine, a stage of Ray Data."""
