"""What all experiments share: command line, devices, timing, results and reports."""
