"""Examples in files that can be read in any order: the helpers of `distlaunch.data`."""
