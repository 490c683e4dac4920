"""Examples in files, any of which can be read without those before it: the helpers of `distlaunch.data`."""
