#pragma once
#include "cuda_emulator.h"
