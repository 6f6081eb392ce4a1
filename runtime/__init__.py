"""What executes: block pools, tiers, scheduler, model runner, models, processes, server."""
