"""Parts of the readers of tools' text (`readers/nvidia_smi.py`, `readers/rocm_smi.py`).

`pasted` cleans lines and looks for what they name, `topo_matrix` and `rocm_tables` read the tables, and
`pcie_paths` makes a tree of how near devices are over PCIe.
"""
