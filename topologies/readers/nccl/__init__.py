"""Parts of the reader of NCCL's XML (`readers/nccl_xml.py`).

`tree` walks the elements, `gpus` says which GPUs there are, `links` where their NVLinks or xGMI lead, `pcie`
how slots join them, `nics` which ports hang where.
"""
