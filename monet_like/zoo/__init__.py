"""The zoo: schedules solved in advance, named ``zoo:resnet50_184_10.00`` or ``zoo:resnet50_184_10.00@h100``.

`catalogue` says what there is, `build` makes it, `registry` finds it, `download` fetches and checks it, `table` shows
it. Schedules of the profiles a100, h100, h200 and rtx4090 are made from datasheet rates, without these cards.
"""
