"""Write a cluster file for the planner, measured on the devices and links at hand."""
