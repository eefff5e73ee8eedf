#include "../vec/avx512.h"

#define HEADWISE_TARGET avx512
#include "../generic/target.h"
