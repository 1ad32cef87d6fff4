// Everything a trainer needs.
#pragma once

#include "terrace/config.h"
#include "terrace/engine.h"
#include "terrace/error.h"
#include "terrace/model.h"
