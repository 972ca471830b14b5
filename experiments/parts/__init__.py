"""Parts of experiments: one idea per file, so that an experiment reads at a glance."""
